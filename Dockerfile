# leakmel on CPUs, as a user without rights. For example, a list of sensors to visit after each night:
#
#   docker build --tag leakmel .
#   docker run --rm --user "$(id -u)" --volume /data/recordings:/recordings:ro --volume /data/leakmel:/data leakmel \
#     nightly /recordings --model /data/model --state /data/nightly
FROM python:3.11-slim
COPY . /opt/leakmel
RUN python -m venv /opt/leakmel/.venv && cd /opt/leakmel && .venv/bin/python nbs/_tools/install.py cpu learn
ENV PATH=/opt/leakmel/.venv/bin:$PATH HOME=/tmp
RUN useradd leakmel
USER leakmel
WORKDIR /data
ENTRYPOINT ["leakmel"]
