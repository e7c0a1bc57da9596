"""Other routers' own programs: their environments, and how each is started in front of engines."""
