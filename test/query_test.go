package test

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"
)

// queryWait is a client's patience: as long as nanny's own default.
const queryWait = 5 * time.Second

// question returns a query for name.
func question(name string, qtype uint16) *dns.Msg {
	return new(dns.Msg).SetQuestion(dns.Fqdn(name), qtype)
}

// exchange sends m to addr, once.
func exchange(network, addr string, m *dns.Msg) (*dns.Msg, error) {
	client := dns.Client{Net: network, Timeout: queryWait, UDPSize: dns.MaxMsgSize}
	r, _, err := client.Exchange(m, addr)
	return r, err
}

// answers tells whether there is a DNS server at addr.
func answers(addr string) bool {
	m := question("version.bind.", dns.TypeTXT)
	m.Question[0].Qclass = dns.ClassCHAOS
	client := dns.Client{Timeout: time.Second}
	_, _, err := client.Exchange(m, addr)
	return err == nil
}

func (c *coreDNS) addr() string { return fmt.Sprintf("127.0.0.1:%d", c.port) }

// says returns the addresses that c gives for name, sorted and joined by a space; without any, the RCODE or the error.
func (c *coreDNS) says(name string) string { return says("udp", c.addr(), name) }

func says(network, addr, name string) string {
	r, err := exchange(network, addr, question(name, dns.TypeA))
	if err != nil {
		return err.Error()
	}
	var list []string
	for _, rr := range r.Answer {
		if a, ok := rr.(*dns.A); ok {
			list = append(list, a.A.String())
		}
	}
	if len(list) == 0 {
		return dns.RcodeToString[r.Rcode]
	}
	slices.Sort(list)
	return strings.Join(list, " ")
}

// wants checks what c says for name, now.
func (c *coreDNS) wants(t *testing.T, name, want string) {
	t.Helper()
	if got := c.says(name); got != want {
		t.Errorf("%s: got %s, want %s", name, got, want)
	}
}

// waits waits until c says want for name and returns how long that took.
func (c *coreDNS) waits(t *testing.T, name, want string) time.Duration {
	t.Helper()
	return c.waitsFor(t, patience, name, want)
}

func (c *coreDNS) waitsFor(t *testing.T, limit time.Duration, name, want string) time.Duration {
	t.Helper()
	var got string
	defer func() {
		if got != want {
			t.Logf("%s: last answer %s", name, got)
		}
	}()
	return within(t, limit, name+" is "+want, func() bool {
		got = c.says(name)
		return got == want
	})
}

// minPort keeps a dnsmasq that asks others, from any port otherwise, from those of freePort.
const minPort = "--min-port=33000"

// dnsmasq starts an upstream with args and returns its port.
func dnsmasq(t *testing.T, args ...string) int {
	t.Helper()
	port := freePort(t)
	args = append([]string{"--keep-in-foreground", "--conf-file=/dev/null", "--no-resolv", "--no-hosts", "--user=", "--group=", "--pid-file=", minPort,
		"--log-facility=-", "--bind-interfaces", "--listen-address=127.0.0.1", fmt.Sprintf("--port=%d", port)}, args...)
	cmd := exec.Command(dnsmasqPath(t), args...)
	logs := &logBuffer{}
	cmd.Stderr = logs
	cmd.WaitDelay = time.Second
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) // its own group: its processes for TCP, too
		_ = cmd.Wait()
	})
	addr := fmt.Sprintf("127.0.0.1:%d", port)
	within(t, patience, "the upstream answers", func() bool { return answers(addr) })
	return port
}

func dnsmasqPath(t *testing.T) string {
	t.Helper()
	for _, name := range []string{"dnsmasq", "/usr/sbin/dnsmasq", "/usr/local/sbin/dnsmasq"} {
		if path, err := exec.LookPath(name); err == nil {
			return path
		}
	}
	t.Fatal("no dnsmasq")
	return ""
}

// silent listens and never answers; it returns its port.
func silent(t *testing.T) int {
	t.Helper()
	return takenPort(t)
}

// script writes an executable shell script and returns its path.
func script(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(tempDir(t), "script")
	if err := os.WriteFile(path, []byte("#!/bin/sh\n"+text), 0o755); err != nil {
		t.Fatal(err)
	}
	return path
}

// idleTCP opens a connection to addr, asks one question on it and leaves it open until the test ends.
func idleTCP(t *testing.T, addr, name string) {
	t.Helper()
	conn, err := net.DialTimeout("tcp", addr, queryWait)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	_ = conn.SetDeadline(time.Now().Add(queryWait))
	co := &dns.Conn{Conn: conn}
	if err := co.WriteMsg(question(name, dns.TypeA)); err != nil {
		t.Fatal(err)
	}
	if _, err := co.ReadMsg(); err != nil {
		t.Fatal(err)
	}
}

// put writes a file of a watched directory in one step.
func put(t *testing.T, dir, name, content string) {
	t.Helper()
	tmp := filepath.Join(filepath.Dir(dir), fmt.Sprintf("put-%s-%s", filepath.Base(dir), name))
	if err := os.WriteFile(tmp, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(tmp, filepath.Join(dir, name)); err != nil {
		t.Fatal(err)
	}
}

// remove removes a file of a watched directory.
func remove(t *testing.T, dir, name string) {
	t.Helper()
	if err := os.Remove(filepath.Join(dir, name)); err != nil {
		t.Fatal(err)
	}
}

// configDir returns a directory with files, to be watched. 00.conf keeps its dnsmasq from the system's resolv.conf and
// hosts.
func configDir(t *testing.T, files map[string]string) string {
	t.Helper()
	dir := filepath.Join(tempDir(t), "config")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	put(t, dir, "00.conf", "no-resolv\nno-hosts\n")
	for name, content := range files {
		put(t, dir, name, content)
	}
	return dir
}

// watching is a nanny block for dir with further properties.
func watching(dir string, properties ...string) string {
	return nanny(append([]string{"config " + dir}, properties...)...)
}

// nanny is a nanny block with properties. One with a # is put in quotes, as # begins a comment anywhere in a Corefile.
func nanny(properties ...string) string { return "nanny {\n" + strings.Join(properties, "\n") + "\n}" }

// runTest lets dnsmasq check a configuration file. What it says of it doesn't matter.
func runTest(t *testing.T, file string) {
	t.Helper()
	_ = exec.Command(dnsmasqPath(t), "--test", "--conf-file="+file).Run()
}
