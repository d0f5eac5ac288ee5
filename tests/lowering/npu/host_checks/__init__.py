"""The host code's checks: for each operator a legal call, and one that each check alone refuses."""
