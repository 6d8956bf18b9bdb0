"""One file an API: the bodies it takes, the bodies it gives, its routes. Each has ``add_routes(app, service)``."""
