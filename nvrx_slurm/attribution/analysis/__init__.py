"""What the recognised lines come to: the cause before its consequences, as one Attribution. Pure."""
