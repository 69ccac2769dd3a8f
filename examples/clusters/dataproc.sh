#!/bin/bash
# Dataproc: a cluster of four workers without an autoscaling policy, and the job. First `sparkring package`, and
# dataproc_init.sh into the bucket. https://cloud.google.com/sdk/gcloud/reference/dataproc/jobs/submit/pyspark
set -euo pipefail
bucket=${BUCKET:?gs://name} region=${REGION:?europe-west1}
gcloud dataproc clusters create sparkring --region="$region" --image-version=2.3-debian12 --num-workers=4 \
  --worker-machine-type=n2-standard-4 --initialization-actions="$bucket/dataproc_init.sh"
# Dataproc turns dynamic allocation on. A rank takes its executor's four cores.
properties=spark.dynamicAllocation.enabled=false,spark.executor.instances=4,spark.executor.cores=4
properties+=,spark.task.cpus=4,spark.executor.memory=4g,spark.executor.memoryOverhead=6g
properties+=,spark.pyspark.python=/opt/conda/default/bin/python
gcloud dataproc jobs submit pyspark dist/sparkring_job.py --cluster=sparkring --region="$region" \
  --py-files=dist/sparkring.zip --files=recipe.yaml --properties="$properties" \
  -- run recipe.yaml launch.world=4 "$@"
