"""Between the wire (protobuf) and the domain: one module for each peer of the router."""
