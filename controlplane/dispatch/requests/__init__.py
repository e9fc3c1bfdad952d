"""A request's way: it waits in a queue, is placed on an instance or moved to another region, and its tokens are counted."""
