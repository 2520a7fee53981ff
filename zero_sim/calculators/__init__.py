"""Memory and traffic from closed forms, and ledgers from measured runs."""
