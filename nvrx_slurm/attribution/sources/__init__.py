"""Who can be asked about a failure: the rules here, an MCP server, services over HTTP."""
