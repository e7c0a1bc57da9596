"""`python -m bench gpu`: what Pointsman does on one GPU, in parts that are processes of their own."""
