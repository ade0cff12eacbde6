"""The models of a server, for its administrator: load, unload and pin them."""
