"""What is told to others about a decided failure: Slack, an index, the ledger of suspect nodes."""
