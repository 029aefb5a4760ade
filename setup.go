package nanny

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/coredns/caddy"
	"github.com/coredns/coredns/core/dnsserver"
	"github.com/coredns/coredns/plugin"
	"github.com/coredns/coredns/plugin/dnstap"
)

const (
	defaultTimeout  = 5 * time.Second
	defaultInterval = 10 * time.Second
	minInterval     = 100 * time.Millisecond
	startWait       = readyTime + 5*time.Second // for the first child of a block that a reload brings
)

// programDirs are searched for dnsmasq after $PATH, where an unprivileged user often lacks the sbin directories.
var programDirs = []string{"/usr/sbin", "/usr/local/sbin", "/opt/homebrew/sbin"}

func init() {
	plugin.Register("nanny", setup)
	// dnsmasq answers version.bind and the like itself; without this CoreDNS refuses every class but IN.
	dnsserver.EnableChaos["nanny"] = struct{}{}
}

func setup(c *caddy.Controller) error {
	blocks, err := parse(c)
	if err != nil {
		return plugin.Error("nanny", err)
	}
	l := children.loadOf(c)
	for _, n := range blocks {
		if err := l.claim(n); err != nil {
			return plugin.Error("nanny", err)
		}
	}
	for i, n := range blocks {
		var inner plugin.Handler
		if i+1 < len(blocks) {
			inner = blocks[i+1]
		}
		dnsserver.GetConfig(c).AddPlugin(func(next plugin.Handler) plugin.Handler {
			n.Next = next
			if inner != nil {
				n.Next = inner
			}
			return n
		})
		c.OnStartup(func() error {
			if d, ok := dnsserver.GetConfig(c).Handler("dnstap").(*dnstap.Dnstap); ok {
				n.setTap(d)
			}
			if err := n.start(l); err != nil {
				return plugin.Error("nanny", err)
			}
			return nil
		})
	}
	return nil
}

// start acquires the block's child. In a reload of the Corefile it waits until a new child is in service, so that
// the running instance goes on where that fails.
func (n *Nanny) start(l *load) error {
	label := strings.Join(n.zones, " ")
	n.set.zones = n.zones
	sup, fresh, err := children.acquire(l, n.spec, n.set, label)
	if err != nil {
		return err
	}
	n.observer = newObserver(label)
	n.sup.Store(sup)
	if l.parent == nil || !fresh {
		return nil
	}
	select {
	case err = <-sup.first:
	case <-sup.gated:
	case <-time.After(startWait):
		err = fmt.Errorf("no dnsmasq in service after %s", startWait)
	}
	if err != nil {
		return fmt.Errorf("the Corefile isn't taken over: %w", err)
	}
	return nil
}

// parse reads all nanny blocks of one server block.
func parse(c *caddy.Controller) ([]*Nanny, error) {
	var blocks []*Nanny
	for c.Next() {
		n, err := parseBlock(c)
		if err != nil {
			return nil, err
		}
		blocks = append(blocks, n)
	}
	return blocks, nil
}

func parseBlock(c *caddy.Controller) (*Nanny, error) {
	n := &Nanny{
		where: fmt.Sprintf("%s:%d", c.File(), c.Line()),
		set:   settings{interval: defaultInterval, timeout: defaultTimeout},
	}
	var err error
	args := c.RemainingArgs()
	if len(args) == 0 {
		n.zones = plugin.OriginsFromArgsOrServerBlock(nil, c.ServerBlockKeys)
	} else if n.zones, err = parseZones(c, args); err != nil {
		return nil, err
	}
	seen := map[string]bool{}
	for c.NextBlock() {
		property := c.Val()
		if seen[property] && !slices.Contains([]string{"args", "except"}, property) {
			return nil, c.Errf("property '%s' is given twice", property)
		}
		seen[property] = true
		if err := parseProperty(c, n, property); err != nil {
			return nil, err
		}
	}
	if n.spec.path == "" {
		if n.spec.path, err = findProgram("dnsmasq"); err != nil {
			return nil, c.Errf("exec: %v", err)
		}
	}
	return n, nil
}

func parseProperty(c *caddy.Controller, n *Nanny, property string) error {
	args := c.RemainingArgs()
	least, most := 1, 1
	switch property {
	case "args", "resolver", "except":
		most = len(args)
	case "fallthrough":
		least, most = 0, len(args)
	case "config":
		most = 2
	}
	if len(args) < least || len(args) > most {
		return c.Errf("wrong count of arguments for '%s': %d", property, len(args))
	}

	var err error
	switch property {
	case "exec":
		if n.spec.path, err = findProgram(args[0]); err != nil {
			return c.Errf("exec: %v", err)
		}
	case "args":
		n.spec.args = append(n.spec.args, args...) // all of them, since an option may take its argument from the next line
		if arg, name := refusedArg(n.spec.args); arg != "" {
			return c.Errf("args '%s': %s is set by nanny alone", arg, name)
		}
	case "config":
		return parseConfig(c, n, args)
	case "reload":
		modes := map[string]reloadMode{"auto": reloadAuto, "restart": reloadRestart, "off": reloadOff}
		mode, ok := modes[args[0]]
		if !ok {
			return c.Errf("reload '%s': must be auto, restart or off", args[0])
		}
		n.set.reload = mode
	case "listen":
		n.spec.listen, err = netip.ParseAddrPort(args[0])
		if err != nil || n.spec.listen.Port() == 0 || n.spec.listen.Addr().IsUnspecified() || n.spec.listen.Addr().IsMulticast() {
			return c.Errf("listen '%s': must be one address of this host and a port, as 127.0.0.1:5353 or [::1]:5353", args[0])
		}
	case "resolver":
		for _, a := range args {
			ap, err := parseResolver(a)
			if err != nil {
				return c.Errf("resolver '%s': must be an IP address, or one with a port", a)
			}
			n.set.resolver = append(n.set.resolver, ap)
		}
	case "except":
		zones, err := parseZones(c, args)
		if err != nil {
			return err
		}
		n.except = append(n.except, zones...)
	case "fallthrough":
		if _, err := parseZones(c, args); err != nil {
			return err
		}
		n.fall.SetZonesFromArgs(args)
	case "timeout":
		n.set.timeout, err = parseDuration(c, property, args[0], time.Millisecond)
	case "max_concurrent":
		n.maxConcurrent, err = strconv.ParseInt(args[0], 10, 64)
		if err != nil || n.maxConcurrent < 0 {
			return c.Errf("max_concurrent '%s': must be a count of queries, or 0 for no limit", args[0])
		}
	case "stats":
		n.set.stats, err = parseDuration(c, property, args[0], minInterval)
	default:
		return c.Errf("unknown property '%s'", property)
	}
	return err
}

// parseConfig reads `config DIR [INTERVAL]`.
func parseConfig(c *caddy.Controller, n *Nanny, args []string) (err error) {
	dir := args[0]
	if dir == "" { // as from a variable that isn't set; it would be the working directory
		return c.Errf("config '': must be a directory")
	}
	if root := dnsserver.GetConfig(c).Root; !filepath.IsAbs(dir) && root != "" {
		dir = filepath.Join(root, dir)
	}
	if n.spec.dir, err = filepath.Abs(dir); err != nil {
		return c.Errf("config '%s': %v", args[0], err)
	}
	parent := filepath.Dir(n.spec.dir)
	if info, err := os.Stat(parent); err != nil {
		return c.Errf("config '%s': the directory's parent can't be used: %v", args[0], err)
	} else if !info.IsDir() {
		return c.Errf("config '%s': %s is not a directory", args[0], parent)
	}
	if len(args) == 2 {
		n.set.interval, err = parseDuration(c, "config", args[1], minInterval)
	}
	return err
}

func parseDuration(c *caddy.Controller, property, s string, least time.Duration) (time.Duration, error) {
	d, err := time.ParseDuration(s)
	if err != nil {
		return 0, c.Errf("%s '%s': not a duration such as 10s", property, s)
	}
	if d < least {
		return 0, c.Errf("%s '%s': must be at least %s", property, s, least)
	}
	return d, nil
}

func parseZones(c *caddy.Controller, args []string) ([]string, error) {
	var zones []string
	for _, a := range args {
		z := plugin.Host(a).NormalizeExact()
		if len(z) == 0 {
			return nil, c.Errf("'%s' is not a zone", a)
		}
		zones = append(zones, z...)
	}
	return zones, nil
}

func parseResolver(s string) (netip.AddrPort, error) {
	if ap, err := netip.ParseAddrPort(s); err == nil {
		if ap.Port() == 0 {
			return ap, errors.New("port 0")
		}
		return ap, nil
	}
	if strings.HasPrefix(s, "[") {
		return netip.ParseAddrPort(s + ":53")
	}
	addr, err := netip.ParseAddr(s)
	return netip.AddrPortFrom(addr, 53), err
}

// findProgram finds the program name in $PATH and programDirs. The error says what to install.
func findProgram(name string) (string, error) {
	path, err := exec.LookPath(name)
	if errors.Is(err, exec.ErrNotFound) && !strings.Contains(name, "/") {
		for _, dir := range programDirs {
			if path, err = exec.LookPath(filepath.Join(dir, name)); err == nil {
				break
			}
		}
	}
	where := "isn't there"
	switch {
	case err == nil:
		return filepath.Abs(path)
	case errors.Is(err, fs.ErrPermission):
		return "", fmt.Errorf("'%s' can't be executed: make it executable, or name another program: %w", name, err)
	case !strings.Contains(name, "/"):
		where = "is neither in $PATH nor in " + strings.Join(programDirs, ", ")
	case !errors.Is(err, fs.ErrNotExist):
		return "", fmt.Errorf("'%s' is no program: %w", name, err)
	}
	return "", fmt.Errorf("'%s' %s: install dnsmasq (package dnsmasq-base on Debian and Ubuntu, "+
		"dnsmasq on Alpine, Fedora and Homebrew), or name the program: %w", name, where, err)
}
