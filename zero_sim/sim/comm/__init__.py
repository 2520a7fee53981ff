"""Process groups and stores: receive calls, match them between ranks, and move data."""
