"""What requests wait for where instances share their GPUs: how long groups take, what is drained, what is swapped."""
