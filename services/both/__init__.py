"""A worker that does both stages on one engine, in one batch, over one pool of pages: for small sites."""
