# The server, from the wheels in dist/ (python vendor/wheels.py, or those of a release).
# src/kqview/server/RUNNING.md says how to run it.
FROM python:3.13-slim

# One version lies there; what it needs comes from the package index.
# hadolint ignore=DL3013
RUN --mount=type=bind,source=dist,target=/dist \
    pip install --no-cache-dir --find-links /dist 'kqview[server]'

# No account of the image, and nothing that it may write but /tmp.
USER 5001:5001
WORKDIR /tmp
# All addresses of the container; what is published decides who reaches it.
ENV HOME=/tmp KQVIEW_HOST=0.0.0.0
EXPOSE 5001
# Unhealthy while a model loads for longer than the start period, or the engine is stalled.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=4 \
    CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:5001/health')"]
ENTRYPOINT ["kqview", "serve"]
