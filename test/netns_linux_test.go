package test

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// netns is a network namespace of the test's own. A process that does nothing keeps it.
type netns struct {
	name string // of its interface
	pid  int
}

// needs fails the test that isn't run by root or lacks a tool; on a developer's machine, one without root is skipped.
func needs(t *testing.T, tools ...string) {
	t.Helper()
	if os.Geteuid() != 0 {
		if os.Getenv("CI") == "" {
			t.Skip("only root makes network namespaces")
		}
		t.Fatal("only root makes network namespaces")
	}
	for _, tool := range tools {
		if _, err := exec.LookPath(tool); err != nil {
			t.Fatalf("%v (scripts/deps.sh installs it)", err)
		}
	}
}

// newNetns makes a namespace whose interface, still to be made, is called name.
func newNetns(t *testing.T, name string) *netns {
	t.Helper()
	cmd := exec.Command("cat") // ends with the test's process, whatever becomes of that
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
	if err := cmd.Start(); err != nil {
		t.Fatalf("no network namespace: %v", err)
	}
	t.Cleanup(func() {
		in.Close()
		_ = cmd.Wait()
	})
	n := &netns{name, cmd.Process.Pid}
	// The test isn't about the detection of duplicate addresses, which takes seconds.
	n.run(t, "sh", "-c", "echo 0 >/proc/sys/net/ipv6/conf/default/accept_dad && ip link set lo up")
	return n
}

// connect makes the interfaces of a and b, joined by a wire.
func connect(t *testing.T, a, b *netns) {
	t.Helper()
	a.run(t, "ip", "link", "add", a.name, "type", "veth", "peer", "name", b.name, "netns", fmt.Sprint(b.pid))
	for _, n := range []*netns{a, b} {
		n.run(t, "ip", "link", "set", n.name, "up")
	}
}

// enter is a command that runs its arguments in the namespace, as the same process.
func (n *netns) enter() []string {
	return []string{"nsenter", fmt.Sprintf("--net=/proc/%d/ns/net", n.pid)}
}

// run runs a command in the namespace and returns what it prints.
func (n *netns) run(t *testing.T, args ...string) string {
	t.Helper()
	out, err := n.try(args...)
	if err != nil {
		t.Fatalf("%q: %v\n%s", args, err, out)
	}
	return out
}

func (n *netns) try(args ...string) (string, error) {
	args = append(n.enter(), args...)
	cmd := exec.Command(args[0], args[1:]...)
	cmd.WaitDelay = time.Second
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// do calls f on a thread in the namespace: the sockets that f makes are there.
func (n *netns) do(t *testing.T, f func()) {
	t.Helper()
	var err error
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // for good: the thread ends with the goroutine
		var ns *os.File
		if ns, err = os.Open(fmt.Sprintf("/proc/%d/ns/net", n.pid)); err != nil {
			return
		}
		defer ns.Close()
		if err = unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
			return
		}
		f()
	}()
	<-done
	if err != nil {
		t.Fatal(err)
	}
}

// says is says for a client in the namespace.
func (n *netns) says(t *testing.T, network, addr, name string) (answer string) {
	t.Helper()
	n.do(t, func() { answer = says(network, addr, name) })
	return answer
}

// sockets counts the namespace's UDP sockets on port; family is udp or udp6. The kernel's list isn't of one moment: one that
// has gone and its successor may both be in it. So they have to be in two lists in a row.
func (n *netns) sockets(family string, port int) int {
	first := n.inodes(family, port)
	if len(first) < 2 {
		return len(first)
	}
	count := 0
	for inode := range n.inodes(family, port) {
		if first[inode] {
			count++
		}
	}
	return count
}

func (n *netns) inodes(family string, port int) map[string]bool {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/net/%s", n.pid, family))
	if err != nil {
		panic(err)
	}
	suffix, found := fmt.Sprintf(":%04X", port), map[string]bool{}
	for line := range strings.Lines(string(data)) {
		if f := strings.Fields(line); len(f) > 9 && strings.HasSuffix(f[1], suffix) {
			found[f[9]] = true // proc_net(5), as of tcp
		}
	}
	return found
}

// sampler looks again and again how many sockets a port has.
type sampler struct {
	quit    chan struct{}
	done    chan struct{}
	most    int
	samples int
}

// sample begins to look at port; the most sockets that it ever saw are known after end.
func (n *netns) sample(family string, port int) *sampler {
	s := &sampler{quit: make(chan struct{}), done: make(chan struct{})}
	go func() {
		defer close(s.done)
		tick := time.NewTicker(time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-s.quit:
				return
			case <-tick.C:
				s.samples++
				s.most = max(s.most, n.sockets(family, port))
			}
		}
	}()
	return s
}

func (s *sampler) end() {
	close(s.quit)
	<-s.done
}

// startIn starts CoreDNS in n, with dir in the place of /var/lib/misc, and waits until it listens.
func (n *netns) startIn(t *testing.T, corefile, dir string) *coreDNS {
	t.Helper()
	const mount = `mount --bind "$1" /var/lib/misc && shift && exec "$@"`
	return startAs(t, 53, corefile, append(n.enter(), "unshare", "-m", "sh", "-c", mount, "sh", dir)...)
}

// startNanny starts CoreDNS in n with a nanny block alone, at port 53 of address, and waits until it listens.
func (n *netns) startNanny(t *testing.T, address, config string) *coreDNS {
	t.Helper()
	return n.startIn(t, ".:53 {\n bind "+address+"\n errors\n nanny {\n config "+config+"\n }\n}\n", tempDir(t))
}

// waits waits until the CoreDNS at n's 127.0.0.1 says want for name.
func (n *netns) waits(t *testing.T, name, want string) {
	t.Helper()
	within(t, patience, name+" is "+want, func() bool { return n.says(t, "udp", "127.0.0.1:53", name) == want })
}

// solicit asks for a router advertisement on n's interface and returns it, or what fails.
func (n *netns) solicit(t *testing.T) (ra []byte, err error) {
	t.Helper()
	n.do(t, func() {
		const solicitation, advertisement = 133, 134
		var fd int
		if fd, err = unix.Socket(unix.AF_INET6, unix.SOCK_RAW, unix.IPPROTO_ICMPV6); err != nil {
			return
		}
		f := os.NewFile(uintptr(fd), "icmp")
		defer f.Close()
		tv := unix.NsecToTimeval(int64(200 * time.Millisecond))
		if err = unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv); err != nil {
			return
		}
		if err = unix.SetsockoptString(fd, unix.SOL_SOCKET, unix.SO_BINDTODEVICE, n.name); err != nil {
			return
		}
		if err = unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_MULTICAST_HOPS, 255); err != nil {
			return
		}
		routers := &unix.SockaddrInet6{Addr: [16]byte{0: 0xff, 1: 2, 15: 2}}
		if err = unix.Sendto(fd, []byte{solicitation, 0, 0, 0, 0, 0, 0, 0}, 0, routers); err != nil {
			return
		}
		packet := make([]byte, 1500)
		for deadline := time.Now().Add(time.Second); time.Now().Before(deadline); {
			var size int
			if size, _, err = unix.Recvfrom(fd, packet, 0); err == nil && packet[0] == advertisement {
				ra = packet[:size]
				return
			}
		}
		if err == nil {
			err = io.EOF
		}
	})
	return ra, err
}

// upstream starts a dnsmasq in n with the arguments, waits until it answers, and returns its address.
func (n *netns) upstream(t *testing.T, args ...string) string {
	t.Helper()
	const address = "198.51.100.53"
	n.run(t, "ip", "address", "add", address+"/32", "dev", "lo")
	args = append(append(n.enter(), dnsmasqPath(t), "--keep-in-foreground", "--conf-file=/dev/null", "--no-resolv", "--no-hosts",
		"--user=", "--group=", "--pid-file=", "--log-facility=-", "--bind-interfaces", "--listen-address="+address), args...)
	cmd := exec.Command(args[0], args[1:]...)
	cmd.WaitDelay = time.Second
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	within(t, patience, "the upstream answers", func() (ok bool) {
		n.do(t, func() { ok = answers(address + ":53") })
		return ok
	})
	return address
}
