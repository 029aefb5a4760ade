package nanny

import (
	"syscall"
	"time"
)

// reapGroup collects what is left of a process group whose members became children of CoreDNS: it inherits the
// processes that dnsmasq forked for TCP when it is process 1 of a container. Nobody else's children are touched.
func reapGroup(pgid int) {
	for range 100 {
		var status syscall.WaitStatus
		pid, err := syscall.Wait4(-pgid, &status, syscall.WNOHANG, nil)
		if err != nil { // ECHILD: none left
			return
		}
		if pid == 0 { // killed, but not yet a zombie
			time.Sleep(time.Millisecond)
		}
	}
}
