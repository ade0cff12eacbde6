"""HTTP and WebSockets, without a model: endpoints, limits, keys, pages, processes."""
