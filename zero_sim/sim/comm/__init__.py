"""Process groups and stores: how calls come in, meet, and move data."""
