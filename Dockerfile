# CoreDNS with nanny and dnsmasq, as user 65532. The Corefile is /etc/coredns/Corefile.
FROM golang:1.26-bookworm AS build
WORKDIR /src
COPY . .
RUN CGO_ENABLED=0 GOFLAGS=-buildvcs=false go -C cmd/coredns build -trimpath -ldflags=-s -o /coredns .

FROM debian:12-slim
# A mount, as a COPY would have CoreDNS in the image twice.
RUN --mount=type=bind,from=build,target=/build \
    /build/src/scripts/image.sh / /build/coredns && rm -rf /var/lib/apt/lists/*
USER 65532:65532
EXPOSE 53/udp 53/tcp
ENTRYPOINT ["/usr/bin/coredns"]
CMD ["-conf", "/etc/coredns/Corefile"]
