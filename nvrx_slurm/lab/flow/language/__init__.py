"""What a flow file says: read, checked, and frozen, before anything runs; and written, for people."""
