"""Operations in flight: when they read and write, what is lent to them, and races with it."""
