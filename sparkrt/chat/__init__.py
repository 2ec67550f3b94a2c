"""`sparkrt chat`: a conversation in a terminal, with a model in this process or with a server."""
