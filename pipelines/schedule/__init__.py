"""Dates: one, a backfill, the ledger of their ends, and the lease that lets one job at a time publish."""
