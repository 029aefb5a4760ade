package main

import (
	"bytes"
	"fmt"
	"html"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Sizes in pixels. A panel has its title, its legend, and below these the plot.
const (
	columns     = 2
	panelWidth  = 430
	panelHeight = 210
	left        = 48
	right       = 14
	top         = 46
	bottom      = 24
	plotWidth   = panelWidth - left - right
	plotHeight  = panelHeight - top - bottom
	keyHeight   = 26
)

// The colours of series can be seen on white and on black.
var colours = []string{"#3a86c8", "#e08a2e", "#3fa35f", "#d0504f", "#8d68cc", "#8c8c3a"}

const style = `text { font: 11px system-ui, sans-serif; fill: #424a53 }
.t { font-size: 13px; font-weight: 600; fill: #1f2328 }
.g { stroke: #808080; stroke-opacity: .25 }
.l { fill: none; stroke-width: 1.5; stroke-linejoin: round }
.change, .wrong, .kill { stroke-opacity: .8 }
.change { stroke: #808080 }
.wrong { stroke: #d0504f; stroke-dasharray: 5 3 }
.kill { stroke: #d0504f; stroke-dasharray: 1.5 2.5 }
@media (prefers-color-scheme: dark) { text { fill: #b1bac4 } .t { fill: #f0f6fc } }
`

// key explains the vertical lines.
var key = []struct{ kind, text string }{
	{"change", "a change of the directory"}, {"wrong", "a wrong one"}, {"kill", "dnsmasq is killed"},
}

// draw makes one SVG of panels, with a vertical line in each for an event.
func draw(panels []panel, events []event, length time.Duration) []byte {
	var b bytes.Buffer
	rows := (len(panels) + columns - 1) / columns
	width, height := columns*panelWidth, rows*panelHeight+keyHeight
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" width="%d" height="%d" role="img" aria-label="Panels of the dashboard">`+"\n", width, height, width, height)
	fmt.Fprintf(&b, "<style>\n%s</style>\n", style)
	for i := range panels {
		fmt.Fprintf(&b, `<g transform="translate(%d %d)">`+"\n", i%columns*panelWidth, i/columns*panelHeight)
		panels[i].draw(&b, events, length)
		b.WriteString("</g>\n")
	}
	x, y := left, rows*panelHeight+14
	for _, k := range key {
		fmt.Fprintf(&b, `<path class="%s" d="M%d %dv-14"/><text x="%d" y="%d">%s</text>`+"\n", k.kind, x, y+3, x+8, y, k.text)
		x += 8 + textWidth(k.text) + 24
	}
	b.WriteString("</svg>\n")
	return b.Bytes()
}

// textWidth is about how wide text is.
func textWidth(text string) int { return len(text)*13/2 + 4 }

func (p *panel) draw(b *bytes.Buffer, events []event, length time.Duration) {
	unit := p.FieldConfig.Defaults.Unit
	fmt.Fprintf(b, `<text class="t" x="%d" y="18">%s</text>`+"\n", left, html.EscapeString(p.Title))
	x := left
	for i, s := range p.series {
		fmt.Fprintf(b, `<path d="M%d 29h8v8h-8z" fill="%s"/><text x="%d" y="37">%s</text>`+"\n", x, colours[i%len(colours)], x+12, html.EscapeString(s.name))
		x += 12 + textWidth(s.name) + 10
	}

	limit, tick := scale(p.highest(), p.FieldConfig.Defaults.Max)
	yOf := func(v float64) float64 { return top + plotHeight*(1-v/limit) }
	xOf := func(at time.Duration) float64 { return left + plotWidth*at.Seconds()/length.Seconds() }
	for v := 0.0; v < limit+tick/2; v += tick {
		fmt.Fprintf(b, `<path class="g" d="M%d %sh%d"/><text x="%d" y="%s" text-anchor="end">%s</text>`+"\n",
			left, short(yOf(v)), plotWidth, left-5, short(yOf(v)+4), format(v, limit, unit))
	}
	for i := range 5 {
		at := length * time.Duration(i) / 4
		fmt.Fprintf(b, `<text x="%s" y="%d" text-anchor="%s">%s s</text>`+"\n", short(xOf(at)), panelHeight-bottom+14, pick(i == 4, "end", "middle"), short(at.Seconds()))
	}

	under := make([]float64, len(p.series[0].points)) // what is below, where series are put upon each other
	for i, s := range p.series {
		colour := colours[i%len(colours)]
		if p.bars() {
			p.drawBars(b, s, under, colour, xOf, yOf)
			continue
		}
		over := slices.Clone(s.points)
		if p.stacked() {
			for i := range over {
				if math.IsNaN(over[i]) {
					over[i] = 0
				}
				over[i] += under[i]
			}
			var path strings.Builder
			for i, v := range over {
				fmt.Fprintf(&path, "%s%s %s", pick(i == 0, "M", "L"), short(xOf(time.Duration(i)*p.step())), short(yOf(v)))
			}
			for i, v := range slices.Backward(under) {
				fmt.Fprintf(&path, "L%s %s", short(xOf(time.Duration(i)*p.step())), short(yOf(v)))
			}
			fmt.Fprintf(b, `<path d="%sz" fill="%s" fill-opacity=".35"/>`+"\n", path.String(), colour)
			under = over
		}
		var path strings.Builder
		gap := true
		for i, v := range over {
			if math.IsNaN(v) {
				gap = true
				continue
			}
			fmt.Fprintf(&path, "%s%s %s", pick(gap, "M", "L"), short(xOf(time.Duration(i)*p.step())), short(yOf(v)))
			gap = false
		}
		fmt.Fprintf(b, `<path class="l" stroke="%s" d="%s"/>`+"\n", colour, path.String())
	}
	for _, e := range events {
		fmt.Fprintf(b, `<path class="%s" d="M%s %dv%d"/>`+"\n", e.kind, short(xOf(e.at)), top, plotHeight)
	}
}

// drawBars draws s as bars upon under, and adds it there. A bar covers the step that ends at its point.
func (p *panel) drawBars(b *bytes.Buffer, s series, under []float64, colour string, xOf func(time.Duration) float64, yOf func(float64) float64) {
	var path strings.Builder
	for i, v := range s.points {
		if i == 0 || math.IsNaN(v) || v <= 0 {
			continue
		}
		x, wide := xOf(time.Duration(i-1)*p.step())+1, xOf(p.step())-xOf(0)-2
		fmt.Fprintf(&path, "M%s %sH%sV%sH%sz", short(x), short(yOf(under[i])), short(x+wide), short(yOf(under[i]+v)), short(x))
		under[i] += v
	}
	fmt.Fprintf(b, `<path d="%s" fill="%s" fill-opacity=".75"/>`+"\n", path.String(), colour)
}

func pick[T any](first bool, a, b T) T {
	if first {
		return a
	}
	return b
}

// highest is the largest value to be drawn.
func (p *panel) highest() float64 {
	highest := 0.0
	for i := range p.series[0].points {
		sum := 0.0
		for _, s := range p.series {
			if v := s.points[i]; !math.IsNaN(v) {
				sum = pick(p.stacked(), sum+v, max(sum, v))
			}
		}
		highest = max(highest, sum)
	}
	return highest
}

// scale returns the end of an axis up to highest, and the distance of its lines: 1, 2 or 5 times a power of ten.
func scale(highest float64, fixed *float64) (limit, tick float64) {
	if fixed != nil {
		return *fixed, *fixed / 4
	}
	tick = math.Pow(10, math.Floor(math.Log10(highest)))
	for _, f := range []float64{0.1, 0.2, 0.5, 1, 2} {
		if t := tick * f; highest/t <= 5 {
			tick = t
			break
		}
	}
	return math.Ceil(highest/tick) * tick, tick
}

// short is f with at most one digit after the point.
func short(f float64) string {
	return strconv.FormatFloat(math.Round(f*10)/10, 'f', -1, 64)
}

// format is the text at an axis up to limit.
func format(v, limit float64, unit string) string {
	number := func(v float64) string { return strconv.FormatFloat(math.Round(v*1000)/1000, 'f', -1, 64) }
	switch unit {
	case "s":
		if limit < 1 {
			return number(v*1000) + " ms"
		}
		return number(v) + " s"
	case "reqps", "cps":
		return number(v) + "/s"
	case "percentunit":
		return number(v*100) + " %"
	}
	return number(v)
}
