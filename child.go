package nanny

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"sync"
	"syscall"
	"time"
)

const (
	stopTime  = 3 * time.Second // from SIGTERM to SIGKILL
	waitDelay = time.Second     // how long a silent output may stay open after the child has ended
)

// command is what a child is started from.
type command struct {
	path string     // absolute path of the program
	args []string   // its arguments, without the program's name
	port port       // where it is going to answer; released when it is gone
	priv privileges // the user it runs as
	emit func(line string)
}

// child is one dnsmasq process, from its start until it is gone: reaped, its process group ended, its last
// line logged. It is its own only waiter.
type child struct {
	addr    netip.AddrPort
	pid     int
	started time.Time
	done    chan struct{} // closed when it is gone

	err     error // why it ended; valid after done
	process *os.Process
	output  *lineLog
	ending  sync.Once
}

// start starts c's program: no shell, no standard input, a process group of its own and an environment reduced to
// PATH, LANG=C and TZ. On Linux it gets SIGTERM when CoreDNS ends in whatever way; that signal is tied to the
// thread that started it, so one is kept for each child (prctl(2), PR_SET_PDEATHSIG). SIGTERM, not SIGKILL:
// dnsmasq then ends the processes it forked for TCP too. On an error the port is still the caller's.
func start(c command) (*child, error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("no pipe for dnsmasq's log: %w", err)
	}
	cmd := exec.Command(c.path, c.args...) // #nosec G204 -- the Corefile's owner names the program
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "LANG=C"}
	if tz, ok := os.LookupEnv("TZ"); ok {
		cmd.Env = append(cmd.Env, "TZ="+tz)
	}
	cmd.Dir = "/"
	cmd.Stdout, cmd.Stderr = w, w
	cmd.SysProcAttr = c.priv.sysProcAttr()
	cmd.WaitDelay = waitDelay

	ch := &child{addr: c.port.addr, started: time.Now(), done: make(chan struct{})}
	began := make(chan error)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		w.Close()
		if err != nil {
			r.Close()
			began <- err
			return
		}
		ch.pid, ch.process = cmd.Process.Pid, cmd.Process
		ch.output = newLineLog(r, c.emit)
		began <- nil
		ch.wait(cmd, r)
		c.port.release()
		close(ch.done)
	}()
	if err := <-began; err != nil {
		return nil, fmt.Errorf("%s can't be started: %w", c.path, err)
	}
	return ch, nil
}

// wait reaps the child. The processes that dnsmasq forks for TCP outlive it, and hold its port and its standard
// error; so the group is ended in any case, while the child's unreaped entry still keeps its number from reuse.
func (ch *child) wait(cmd *exec.Cmd, output *os.File) {
	waitExit(ch.pid)
	ch.signalGroup(syscall.SIGKILL)
	err := cmd.Wait()
	ch.output.await(ch.output.read, waitDelay) // not for ever: what left the group may have it open
	output.Close()
	ch.output.await(ch.output.logged, waitDelay)
	reapGroup(ch.pid)

	status := exitedWell
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		status = exit.Error()
		if code := exit.ExitCode(); code >= 0 {
			status = fmt.Sprintf("exited with status %d", code)
		}
	} else if err != nil {
		status = err.Error()
	}
	ch.err = &exitError{status: status, tail: ch.output.tail()}
}

const exitedWell = "exited with status 0"

// exitError says how a child ended.
type exitError struct {
	status string // "exited with status N" or "signal: NAME"
	tail   string // its last lines
}

// Error gives the status and the last lines.
func (e *exitError) Error() string {
	if e.tail == "" {
		return "dnsmasq: " + e.status
	}
	return "dnsmasq: " + e.status + ": " + e.tail
}

// signal sends sig to the child; it does nothing once the child is gone.
func (ch *child) signal(sig os.Signal) error {
	if err := ch.process.Signal(sig); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("%v to dnsmasq (pid %d): %w", sig, ch.pid, err)
	}
	return nil
}

func (ch *child) signalGroup(sig syscall.Signal) {
	if err := syscall.Kill(-ch.pid, sig); err != nil && !errors.Is(err, syscall.ESRCH) && !errors.Is(err, syscall.EPERM) {
		log.Errorf("%v to dnsmasq's process group %d: %v", sig, ch.pid, err)
	}
}

// stop ends the child with SIGTERM, or SIGKILL if it takes longer than grace, and returns when it is gone. With grace 0 it
// doesn't wait for another stop's grace.
func (ch *child) stop(grace time.Duration) {
	kill := func() {
		if err := ch.signal(syscall.SIGKILL); err != nil {
			log.Error(err)
		}
	}
	if grace == 0 {
		kill()
		<-ch.done
		return
	}
	ch.ending.Do(func() {
		if err := ch.signal(syscall.SIGTERM); err != nil {
			log.Error(err)
		}
		select {
		case <-ch.done:
		case <-time.After(grace):
			log.Warningf("dnsmasq (pid %d) ignored SIGTERM for %s; killing it", ch.pid, grace)
			kill()
		}
	})
	<-ch.done
}
