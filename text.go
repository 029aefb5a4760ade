package nanny

import (
	"bytes"
	"compress/flate"
	"crypto/sha256"
	"fmt"
	"io"
)

// packFrom is the length in bytes from which a text is kept packed. Shorter ones aren't worth the time.
const packFrom = 64 << 10

// text is the content of a staged file. It stays in memory while its configuration is of use, since a child that is started
// anew may not depend on what is left on the disk; a list of 100,000 names, packed, takes a tenth of its length.
type text struct {
	sum    [sha256.Size]byte // of the content, so that two texts are equal if their sums are
	size   int               // of the content, in bytes
	data   []byte
	packed bool
}

func newText(data []byte) text {
	t := text{sum: sha256.Sum256(data), size: len(data), data: data}
	if len(data) < packFrom {
		return t
	}
	var b bytes.Buffer
	w, err := flate.NewWriter(&b, flate.BestSpeed)
	if err == nil {
		_, err = w.Write(data)
	}
	if err == nil {
		err = w.Close()
	}
	if err != nil { // a buffer takes everything
		return t
	}
	t.data, t.packed = bytes.Clone(b.Bytes()), true
	return t
}

// reader reads the content.
func (t text) reader() io.Reader {
	if !t.packed {
		return bytes.NewReader(t.data)
	}
	return flate.NewReader(bytes.NewReader(t.data))
}

// bytes returns the content.
func (t text) bytes() []byte {
	if !t.packed {
		return t.data
	}
	data := make([]byte, t.size)
	if _, err := io.ReadFull(t.reader(), data); err != nil {
		panic(fmt.Sprintf("unpacking what was packed: %v", err))
	}
	return data
}

// texts are the staged files by path.
type texts map[string]text

func (f texts) set(path string, data []byte) { f[path] = newText(data) }

// long tells whether reading the texts took memory that is worth giving back at once.
func (f texts) long() bool {
	n := 0
	for _, t := range f {
		n += t.size
	}
	return n > 1<<20
}
