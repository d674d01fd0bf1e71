"""What is measured, and what it is measured against: things that keep two nodes of two workers running."""
