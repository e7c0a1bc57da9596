"""Conversions between protobuf messages and the router's own types: one module for each kind of peer."""
