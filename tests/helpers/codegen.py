"""Spark compiles Java for each plan of a user's; the suite's sessions interpret theirs (spark_conf): the same rows."""

COMPILED = {"spark.sql.codegen.wholeStage": "true", "spark.sql.codegen.factoryMode": "FALLBACK"}
