"""The reactive floor under every strategy: what it sees of an endpoint, what it decides, and how it is carried out."""
