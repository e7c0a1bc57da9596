"""What the pages say is so."""
