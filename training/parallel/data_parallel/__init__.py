"""What spreads rows over ranks: all-reduce rings and ZeRO, each with its data axis."""
