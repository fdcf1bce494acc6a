"""The daemon as a client sees it: connection, session, reconnects, a private daemon."""
