"""Operations in flight: their timing, the memory lent to them, and races on this memory."""
