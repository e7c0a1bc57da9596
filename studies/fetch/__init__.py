"""What fetching a cached prefix from another instance gains."""
