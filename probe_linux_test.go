package nanny

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// A question that a child has received and not answered ends with the child.
func TestQuestionEndsWithChild(t *testing.T) {
	ch := startFake(t, "mute", func(string) {})
	awaitFake(t, ch)
	if err := ch.signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	var took time.Duration
	var asked sync.WaitGroup
	asked.Go(func() {
		start := time.Now()
		if _, err := ch.ask(versionProbe(), testPatience); !errors.Is(err, errNoAnswer) {
			t.Errorf("got %v, want no answer", err)
		}
		took = time.Since(start)
	})
	eventually(t, "the child has the question", func() bool { return waiting(t, ch.addr.Port()) })
	ch.stop(0)
	asked.Wait()
	if took > testPatience/2 {
		t.Errorf("it took %s", took)
	}
}

// waiting tells whether a socket at port has received what wasn't read (proc_net_udp: rx_queue).
func waiting(t *testing.T, port uint16) bool {
	t.Helper()
	data, err := os.ReadFile("/proc/net/udp")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(data)) {
		if f := strings.Fields(line); strings.HasSuffix(f[1], fmt.Sprintf(":%04X", port)) && !strings.HasSuffix(f[4], ":00000000") {
			return true
		}
	}
	return false
}
