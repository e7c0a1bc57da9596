"""The scoreboard: Pointsman and other routers' own programs in front of the same engines (`make scoreboard`)."""
