# make         builds bin/coredns: CoreDNS with every stock plugin and nanny
# make run     serves the example configuration on port 1053
# make test    runs the tests, with the real dnsmasq
# make lint    runs the linters and checks the types, of the tests too, for the other systems
# make man     makes the manual page from README.md
# make manifests  brings examples/monitoring's alerts and dashboard into deploy/kubernetes/monitoring
# make fuzz    runs each fuzz target for FUZZTIME
# make bench   compares with forward
# make benchstat  compares the exchange alone with forward's, without CoreDNS around them: 2 minutes
# make pictures  draws docs/monitoring.svg anew, from a Prometheus that scrapes bin/coredns
# make soak    everything that can happen at random, under load, for DURATION
# make events  each thing that can happen many times in a row, under load: 5 minutes

FUZZTIME ?= 20s
DURATION ?= 5m
SEED ?= 1
RATE ?= 2000

STATICCHECK = honnef.co/go/tools/cmd/staticcheck@v0.8.2
BENCHSTAT = golang.org/x/perf/cmd/benchstat@v0.0.0-20260908200009-22c9c6c9d4da
GOLANGCI = github.com/golangci/golangci-lint/v2/cmd/golangci-lint@v2.15.0
TARGETS = darwin/arm64 freebsd/amd64 linux/arm64 linux/mips
# An analyzer that reads all dependencies as source, so that another system takes seconds: go vet would compile them.
TYPECHECK = golang.org/x/tools/go/analysis/passes/lostcancel/cmd/lostcancel@v0.52.0

MAN = man/coredns-nanny.7

.PHONY: build deps deps-tests run test lint man manifests fuzz bench benchstat pictures soak events clean

build:
	go -C cmd/coredns build -o ../../bin/coredns .

deps:
	@scripts/deps.sh

deps-tests:
	@scripts/deps.sh tests

run: deps build
	@scripts/run.sh

test: deps-tests build
	go vet ./...
	go test -race -shuffle=on ./...
	go -C cmd/coredns vet .
	go -C cmd/coredns test -shuffle=on .
	go -C deploy/kubernetes vet .
	go -C deploy/kubernetes test -shuffle=on .

lint:
	@test -z "$$(gofmt -l .)" || { gofmt -d .; exit 1; }
	scripts/man.sh | diff -u $(MAN) - # else: make man
	GOBIN=$(CURDIR)/bin go install $(TYPECHECK)
	@set -e; for t in $(TARGETS); do \
		echo "GOOS=$${t%/*} GOARCH=$${t#*/} bin/lostcancel ./..."; \
		GOOS=$${t%/*} GOARCH=$${t#*/} bin/lostcancel ./...; \
	done
	go run $(STATICCHECK) ./...
	go run $(GOLANGCI) run ./...

man:
	scripts/man.sh >$(MAN).new
	mv $(MAN).new $(MAN)

manifests:
	cp examples/monitoring/dashboard.json deploy/kubernetes/monitoring/
	scripts/prometheusrule.sh <examples/monitoring/rules.yml >deploy/kubernetes/monitoring/rules.yaml

# SIGINT ends a target with success. At the end of -fuzztime Go up to 1.26 may instead fail with "context deadline
# exceeded": https://go.dev/issue/75804.
fuzz: deps
	go test -c -fuzz . -o bin/fuzz.test .
	@set -e; for f in $$(bin/fuzz.test -test.list '^Fuzz'); do \
		echo "$$f: $(FUZZTIME)"; \
		timeout --foreground --preserve-status -s INT $(FUZZTIME) bin/fuzz.test -test.run '^$$' \
			-test.fuzz "^$$f\$$" -test.fuzzcachedir "$$(go env GOCACHE)/fuzz/$$(go list .)"; \
	done

bench: deps build
	@scripts/bench.sh

benchstat: deps
	@mkdir -p bin
	go test -run '^$$' -bench '^BenchmarkExchange$$' -benchmem -count 6 . >bin/exchange.txt
	go run $(BENCHSTAT) -col /way bin/exchange.txt

pictures: deps-tests build
	go build -o bin/pictures ./pictures
	bin/pictures

soak: deps-tests build
	go test ./test -count=1 -timeout 0 -v -run '^TestSoak$$' -soak $(DURATION) -seed $(SEED) -rate $(RATE)

events: deps-tests build
	go test ./test -count=1 -timeout 0 -v -run '^TestEvents$$' -full

clean:
	rm -rf bin
