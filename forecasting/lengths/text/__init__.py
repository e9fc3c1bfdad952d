"""What length models see of a prompt: features, conversations, embeddings."""
