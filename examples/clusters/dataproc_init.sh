#!/bin/bash
# Initialization action of a Dataproc cluster: sparkring on every host, beside the image's own Spark.
# https://cloud.google.com/dataproc/docs/concepts/configuring-clusters/init-actions
set -euo pipefail
/opt/conda/default/bin/pip install "$(/usr/share/google/get_metadata_value attributes/sparkring || echo sparkring)"
