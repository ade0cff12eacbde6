"""Dialects: a folder for each protocol.

``schema.py`` has its typed bodies, ``convert.py`` the pure functions between them and the neutral
types of `kqview.server.models.run`, ``routes.py`` the table ``OPERATIONS`` with its handlers; a
dialect with much to send has its renderers in ``events.py``; OpenAI's completions, of which there
are two, stand in ``completions.py`` from the body to the reply. To add one, write these and name
the routes in `kqview.server.app.DIALECTS`. tests/server/toy_dialect.py is a whole dialect in one
file.

A dialect never imports another; what two of them share is in a file beside the folders.
"""
