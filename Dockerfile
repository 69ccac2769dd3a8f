# sparkring with the locked packages, Java and Horovod: docker build -t sparkring .
# As an image of Spark's executors it needs Spark's own entry point besides; see docs/tutorials/cluster.md.
# The lock is that of the checkout, so the packages of the tests are in the image too.
FROM python:3.11-slim-bookworm AS build
WORKDIR /opt/sparkring
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ make openjdk-17-jre-headless \
    && rm -rf /var/lib/apt/lists/*
COPY . .
RUN TESTS=0 .ci/setup.sh

FROM python:3.11-slim-bookworm
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ openjdk-17-jre-headless procps \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 sparkring
COPY --from=build /opt/sparkring /opt/sparkring
ENV PATH=/opt/sparkring/.venv/bin:$PATH MLFLOW_DISABLE_TELEMETRY=true
USER 1000
WORKDIR /home/sparkring
ENTRYPOINT ["sparkring"]
CMD ["--help"]
