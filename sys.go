package nanny

import (
	"syscall"
	"time"
)

// reapGroup waits until nothing is left of a process group that was killed: until then it may hold sockets. Members that
// became children of CoreDNS, which inherits what dnsmasq forked for TCP when it is process 1 of a container, are
// collected. Nobody else's children are touched, and nobody who doesn't collect his own is waited for long.
func reapGroup(pgid int) {
	for range 100 {
		var status syscall.WaitStatus
		pid, err := syscall.Wait4(-pgid, &status, syscall.WNOHANG, nil)
		if err != nil && syscall.Kill(-pgid, 0) != nil { // ECHILD and ESRCH
			return
		}
		if pid <= 0 { // killed, but not yet gone
			time.Sleep(time.Millisecond)
		}
	}
}
