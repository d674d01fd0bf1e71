"""Attribution as a service, for a whole fleet of jobs."""
