"""A job that ran becomes a flow."""
