package test

import (
	"fmt"
	"net/http"
	"syscall"
	"testing"
)

// TestReady: not ready until the first dnsmasq answers, and after a crash until the next one does.
func TestReady(t *testing.T) {
	t.Parallel()
	gate := tempDir(t)
	slow := script(t, `while [ ! -e `+gate+`/open ]; do sleep 0.05; done
exec `+dnsmasqPath(t)+` "$@"
`)
	port, at := freePort(t), freePort(t)
	c := launch(t, port, server(port, fmt.Sprintf("ready 127.0.0.1:%d {\nmonitor continuously\n}\n", at)+
		nanny("exec "+slow, "args --no-resolv --no-hosts --address=/kept.example/192.0.2.1")))
	status := func() int {
		resp, err := http.Get(fmt.Sprintf("http://127.0.0.1:%d/ready", at))
		if err != nil {
			return 0
		}
		resp.Body.Close()
		return resp.StatusCode
	}
	is := func(want int) {
		t.Helper()
		within(t, patience, fmt.Sprintf("ready says %d", want), func() bool { return status() == want })
	}
	is(http.StatusServiceUnavailable)
	put(t, gate, "open", "")
	is(http.StatusOK)
	c.wants(t, "kept.example", "192.0.2.1")

	remove(t, gate, "open")
	kill(t, c.child(t).pid, syscall.SIGKILL)
	is(http.StatusServiceUnavailable)
	put(t, gate, "open", "")
	is(http.StatusOK)
}
