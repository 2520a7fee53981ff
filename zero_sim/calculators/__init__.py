"""Memory and traffic from closed forms, and the ledger of a measured run."""
