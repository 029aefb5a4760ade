package nanny

import (
	"errors"
	"fmt"
	"os"
	"os/user"
	"slices"
	"strconv"
	"strings"
)

// privileges are the user that a child runs as and the capabilities it has, from its very start: dnsmasq
// never changes its user itself, which would cost the parent-death signal, and a CoreDNS without CAP_KILL the
// way to signal it.
type privileges struct {
	switchUser bool // false: CoreDNS's own user
	uid, gid   uint32
	caps       []uintptr // ambient capabilities (capabilities(7))
	missing    []string  // what a directive needs and CoreDNS doesn't have
	warnings   []string
}

// capability is one that dnsmasq needs for some directives.
type capability struct {
	bit   uintptr
	name  string
	needs func(directive) bool
}

var capabilitiesOf = []capability{
	{capNetBindService, "CAP_NET_BIND_SERVICE", func(d directive) bool {
		return isDHCP(d) || d.name == "enable-tftp"
	}},
	{capNetAdmin, "CAP_NET_ADMIN", func(d directive) bool {
		return isDHCP(d) || slices.Contains([]string{"ipset", "nftset", "conntrack", "connmark-allowlist-enable"}, d.name)
	}},
	{capNetRaw, "CAP_NET_RAW", func(d directive) bool {
		return isDHCP(d) || (slices.Contains([]string{"server", "local", "rev-server"}, d.name) && strings.Contains(d.value, "@"))
	}},
}

// isDHCP tells whether d makes dnsmasq a DHCP server or relay, or a sender of router advertisements.
func isDHCP(d directive) bool {
	return slices.Contains([]string{"dhcp-range", "dhcp-relay", "enable-ra"}, d.name)
}

// findPrivileges chooses the least privileges that the configuration allows. As root: the user that `user` and
// `group` name, else dnsmasq, else nobody, with the capabilities that its directives need. Where CoreDNS isn't root,
// or root without CAP_SETUID, CAP_SETGID or CAP_KILL (a hardened container), and where dnsmasq runs a script of
// the Corefile's owner: CoreDNS's own user.
func findPrivileges(ds []directive, port uint16) (privileges, error) {
	var p privileges
	effective, permitted := ownCapabilities()
	has := func(set uint64, bit uintptr) bool { return set&(1<<bit) != 0 }

	name, group, script := "", "", false
	var nameAt, groupAt directive
	for _, d := range ds {
		switch d.name {
		case "user", "group":
			// Root is for the Corefile's owner to give, not for who can write the directory.
			if d.watched() && isRoot(d) {
				p.warnings = append(p.warnings, d.at()+": "+d.name+" "+d.value+" is root and can only be given in args; line ignored")
				continue
			}
			if d.name == "user" {
				name, nameAt = d.value, d
			} else {
				group, groupAt = d.value, d
			}
		case "dhcp-script", "dhcp-luascript":
			script = true
		}
	}
	u, err := lookupUser(name)
	if err != nil {
		return p, &configError{file: nameAt.file, line: nameAt.line, err: err}
	}
	gid := u.Gid
	if group != "" {
		g, err := user.LookupGroup(group)
		if err != nil {
			if errors.As(err, new(user.UnknownGroupError)) { // it repeats the name as it is, with line breaks too
				err = errors.New("it is unknown")
			}
			return p, &configError{file: groupAt.file, line: groupAt.line, err: fmt.Errorf("there is no group %q: %w", group, err)}
		}
		gid = g.Gid
	}
	if os.Geteuid() == 0 && has(effective, capSetuid) && has(effective, capSetgid) && has(effective, capKill) && !script {
		uid, err1 := strconv.ParseUint(u.Uid, 10, 32)
		gid, err2 := strconv.ParseUint(gid, 10, 32)
		if err1 != nil || err2 != nil {
			return p, fmt.Errorf("user %q has no numeric ids: %s, %s", u.Username, u.Uid, u.Gid)
		}
		p.switchUser, p.uid, p.gid = uid != 0 || gid != 0, uint32(uid), uint32(gid)
	}
	if os.Geteuid() == 0 && !p.switchUser {
		return p, nil // root keeps all that this process has
	}
	for _, c := range capabilitiesOf {
		need := c.bit == capNetBindService && port < 1024
		for _, d := range ds {
			if c.needs(d) {
				need = true
			}
		}
		switch {
		case !need:
		case has(permitted, c.bit):
			p.caps = append(p.caps, c.bit)
		default:
			p.missing = append(p.missing, c.name)
		}
	}
	return p, nil
}

// isRoot tells whether the user or group that d names is root, or a user of root's group, by whatever name.
func isRoot(d directive) bool {
	if d.name == "user" {
		u, err := user.Lookup(d.value)
		return err == nil && (u.Uid == "0" || u.Gid == "0")
	}
	g, err := user.LookupGroup(d.value)
	return err == nil && g.Gid == "0"
}

// lookupUser finds the user that dnsmasq is to run as.
func lookupUser(name string) (*user.User, error) {
	if name != "" {
		u, err := user.Lookup(name)
		if err != nil {
			if errors.As(err, new(user.UnknownUserError)) { // it repeats the name as it is, with line breaks too
				err = errors.New("it is unknown")
			}
			return nil, fmt.Errorf("there is no user %q: %w", name, err)
		}
		return u, nil
	}
	for _, name := range []string{"dnsmasq", "nobody"} {
		if u, err := user.Lookup(name); err == nil {
			return u, nil
		}
	}
	return &user.User{Uid: "65534", Gid: "65534", Username: "nobody"}, nil
}
