# The agent in a container: `buildah build --tag notbefore .`. Use --build-arg for another base image, a mirror or other extras.
# The base image needs python3 (3.11 to 3.13) with venv; both stages use the same one.
ARG BASE=python:3.13-slim

FROM ${BASE} AS build
ARG EXTRAS=all
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY tools/pins.py tools/pins.py
COPY src src
COPY config config
COPY dashboards/*.json dashboards/
# the image gets only the virtual environment, without pip and the sources
# packages from an index are checked by their hashes
RUN python3 -m venv --without-pip /opt/notbefore \
    && python3 -m venv /tmp/build \
    && python3 tools/pins.py --for build >/tmp/build.txt \
    && python3 tools/pins.py --for "agent,${EXTRAS}" >/tmp/agent.txt \
    && /tmp/build/bin/pip install --no-cache-dir --require-hashes --requirement /tmp/build.txt \
    && /tmp/build/bin/pip --python /opt/notbefore/bin/python3 install --no-cache-dir --no-compile \
        --require-hashes --requirement /tmp/agent.txt \
    && /tmp/build/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /tmp/wheel . \
    && /tmp/build/bin/pip --python /opt/notbefore/bin/python3 install --no-compile --no-deps /tmp/wheel/*.whl \
    && /opt/notbefore/bin/python3 -m compileall -q /opt/notbefore

FROM ${BASE}
ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="notbefore" \
      org.opencontainers.image.description="Azure Scheduled Events of a VM as metrics, records and notifications" \
      org.opencontainers.image.source="https://github.com/notbefore/notbefore" \
      org.opencontainers.image.documentation="https://github.com/notbefore/notbefore/tree/main/docs" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
COPY --from=build /opt/notbefore /opt/notbefore
# the base image has no user with this number; the agent writes only to the state directory
RUN install --directory --owner=10169 --group=10169 --mode=0700 /var/lib/notbefore
USER 10169:10169
WORKDIR /var/lib/notbefore
ENV PATH=/opt/notbefore/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    MALLOC_ARENA_MAX=1
VOLUME /var/lib/notbefore
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=30s --timeout=10s --start-period=10s --retries=3 CMD ["notbefore", "health"]
ENTRYPOINT ["notbefore"]
CMD ["run"]
