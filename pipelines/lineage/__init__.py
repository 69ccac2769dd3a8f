"""Where a model's rows came from: recorded for OpenLineage, and shown."""
