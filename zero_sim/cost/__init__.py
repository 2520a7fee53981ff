"""Closed forms of ZeRO's costs (traffic, memory, overlap), and observers that measure them."""
