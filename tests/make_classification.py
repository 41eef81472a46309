"""Makes classification.jsonl: `python -m tests.make_classification > harness/data/classification.jsonl`.

Three kinds of text, twenty labels, fifteen texts a label. Each label has five texts written by hand, with gaps that are
filled three times, and a frame that fits its kind. Same output every time.
"""

# ruff: noqa: E501

import random
import sys

import msgspec

PER_CORE = 3

GAPS = {
    "name": "Ana Petrova|Marcus Webb|Li Wei|Fatima Haddad|Jonas Berg|Priya Nair|Tomás Rivera|Grace Okafor|Yuki Tanaka",
    "thing": "desk lamp|coffee grinder|hiking backpack|office chair|tablet stand|garden hose|winter coat|board game|kettle",
    "plan": "Basic|Team|Family|Premium|Student|Business Plus",
    "amount": "$14.99|€39.00|$129.50|£8.25|$402.10|€61.75|$19.00",
    "day": "Monday|last Tuesday|the 3rd|Friday evening|two weeks ago|the 28th|yesterday",
    "order": "A-20417|#558231|KX-0093|7741-22|#90317|B-66120",
    "browser": "Firefox|Safari on my phone|Chrome|Edge|the Android app|the desktop app",
    "city": "Lisbon|Denver|Osaka|Nairobi|Leeds|Montreal|Gdansk",
    "host": "db-03|web-11|cache-2|ingest-7|gpu-node-4|edge-fra-1|build-19",
    "service": "checkout|search-api|mailer|report-worker|auth-gateway|thumbnailer|ledger",
    "user": "svc-backup|root|jdoe|deploy|monitor|m.keller|ci-runner",
    "ip": "10.4.0.17|192.168.8.201|172.20.3.9|10.66.1.140|203.0.113.44",
    "path": "/var/lib/data|/srv/uploads|/mnt/scratch|/home|/var/log/journal|/opt/models",
    "pct": "91|97|99|88|100",
    "ms": "30012|5004|1250|60000|8731",
    "num": "3|12|48|250|1024|7",
    "version": "2.4.1|1.19.0|0.9.7|5.0.0-rc2|3.11.6",
    "color": "slate grey|forest green|ivory|burnt orange|navy|pale birch",
    "size": "30 cm|1.2 m|450 ml|A5|two litres|85 g",
}

FRAMES = {  # what may come before and after a text of this kind
    "ticket": (
        ("", "Hi, ", "Hello team, ", "Good morning, ", "I hope someone reads this: ", "To whom it may concern, ",
         "Quick question: ", "Sorry to bother you, but ", "Hey, ", "Writing for the third time: "),
        ("", " Thanks, {name}", " Please reply by email.", " What should I do?", " I am not happy about this.",
         " Regards, {name}", " No rush.", " Call me if you need details.", " Sent from my phone", " Customer since 2019."),
    ),
    "product": (
        ("", "New: ", "Back in stock. ", "Our bestseller. ", "Last pieces. ", "Designed in {city}. ", "Limited edition. "),
        ("", " {amount}.", " Two-year guarantee.", " Ships from {city}.", " Also in {color}.", " Rated by {num} buyers.",
         " Returns are free.", " Tested by {name}."),
    ),
    "log": (
        ("2026-03-02T11:20:09Z {host} ", "Nov 21 08:44:57 {host} ", "[{host}] ", "{host} ", "<4>{host} ",
         "2026/01/17 23:59:58 {host} ", "Jul  4 00:00:01 {host} ", "host={host} msg="),
        ("", " [repeated {num} times]", " trace=7f{num}ab", " (pid {ms})", " uptime {num}h"),
    ),
}  # fmt: skip

TEXTS: dict[str, dict[str, tuple[str, ...]]] = {
    "ticket": {
        "billing": (
            "my card was charged {amount} twice ({day}) for the same {plan} subscription. One of them has to go back.",
            "the invoice for order {order} shows the old company address, and our accountant cannot book it like that.",
            "you moved me to the {plan} plan at renewal and took {amount}, which nobody told me about.",
            "is VAT included in the {amount} on your price page? The receipt from {day} lists it separately.",
            "the discount code from your newsletter vanished at checkout and I paid the full {amount} for the {thing}.",
        ),
        "delivery": (
            "tracking for {order} has said 'arriving today' since {day}. The {thing} is still somewhere near {city}.",
            "the parcel was left with a neighbour who has moved out. Can the courier say who signed for the {thing}?",
            "I need to change the address of {order} to our office in {city} before it leaves the warehouse.",
            "half of my order came: the {thing} is here, the spare parts are not, and the slip lists both.",
            "the box looked as if it had been driven over, and the {thing} inside is cracked along one side.",
        ),
        "login": (
            "since {day} {browser} sends me back to the sign-in page right after I enter the correct password.",
            "the reset mail never comes. I looked in spam, tried two addresses and waited until {day}.",
            "I bought a new phone and the authenticator codes are gone, so I am locked out of the {plan} account.",
            "it says my account was disabled for unusual activity in {city}. I have never been there.",
            "our single sign-on stopped working for {num} people at once, all with 'invalid audience' in {browser}.",
        ),
        "bug": (
            "when I sort the table by date in {browser}, row {num} jumps to the top whatever the order is.",
            "exporting to CSV cuts every name at the first accent, so {name} turns into nonsense.",
            "version {version} crashes as soon as I rotate the screen while a photo of the {thing} uploads.",
            "the total at the bottom counts cancelled items: it says {amount} where it should be zero.",
            "dark mode paints the text of the settings page {color} on {color}; I had to guess where to click.",
        ),
        "cancellation": (
            "please end my {plan} subscription at the end of the month and confirm that nothing more is taken.",
            "we are closing our office in {city}, so the {num} seats are no longer needed. How do we give them up?",
            "I ordered the {thing} by mistake on {day}. It has not shipped; just drop {order}.",
            "I cannot find the button to leave. The help page describes a menu that {browser} does not show.",
            "the trial was fine, but {amount} a month is too much for what I do with it, so I will stop here.",
        ),
        "feature request": (
            "it would help us to get a weekly digest instead of {num} separate notifications a day.",
            "could the {thing} page show which items are in stock in {city}? Now I have to ask every time.",
            "we would pay more for a {plan} plan with an audit log: who changed what, and when.",
            "a keyboard shortcut for 'mark as done' would save me an hour a week in {browser}.",
            "please let me schedule a report for {day} and send it to people without an account.",
        ),
        "praise": (
            "{name} from your support stayed on the line until my {thing} worked again. That was outstanding.",
            "I expected trouble with the import and it took four minutes. Whoever built that deserves a raise.",
            "the {thing} from {order} survived a winter in {city} and still looks new. Just wanted to say so.",
            "moving from the {plan} plan was painless and somebody even wrote to ask whether all was well.",
            "your status page told me about the outage before my own alarms did. More companies should be so honest.",
        ),
    },
    "product": {
        "kitchen": (
            "Cast-iron pan, {size}, seasoned with flax oil. Goes from the hob into the oven and outlives its owner.",
            "Hand blender with {num} speeds and a shaft that clicks off for the dishwasher. Cup of {size} included.",
            "Bread box in {color} steel with a bamboo lid that doubles as a cutting board.",
            "Pour-over set: glass server, reusable filter and a scoop for exactly one mug. Holds {size}.",
            "Magnetic knife rail, solid oak, {size} long. Screws and a paper template for the wall are in the box.",
        ),
        "garden": (
            "Folding pruning saw whose blade cuts on the pull. For branches as thick as your wrist; weighs {size}.",
            "Drip irrigation kit for {num} pots, with a timer that forgives a forgotten weekend.",
            "Raised bed of untreated larch, {size} high. Comes flat and goes together without tools.",
            "Seed mix for shady corners: foxglove, wood anemone and fern, enough for ten square metres.",
            "Solar lantern in {color}, charges even under clouds and glows until dawn along the path.",
        ),
        "electronics": (
            "USB-C hub with {num} ports, passes 100 W through to the laptop and stays cool while it does.",
            "Noise-cancelling headphones, {color}, thirty hours on a charge and real buttons instead of touch.",
            "E-ink reader, {size} screen, front light from cold to warm, and no shop on the home page.",
            "Mesh router pair for old houses with thick walls. Set-up by cable, no account wanted. Firmware {version}.",
            "Pocket recorder with two microphones. Press once and it saves in lossless quality for {num} hours.",
        ),
        "clothing": (
            "Merino base layer in {color}, flat seams, worn for a week on a hut tour without anyone complaining.",
            "Rain jacket that packs into its own pocket. Taped seams, hood fits over a bike helmet.",
            "Work trousers with reinforced knees and {num} pockets, cut for people who kneel, climb and carry.",
            "Linen shirt, {color}, buttons of corozo nut. Wrinkles the moment you look at it, as linen should.",
            "Wool socks knitted in {city}, padded at the heel, guaranteed against holes for three years.",
        ),
        "toys": (
            "Marble run of beech wood, {num} pieces, compatible with the bricks that you already step on.",
            "Cooperative board game for two to four owls who want to reach the nest before sunrise.",
            "Kite in {color} with a tail of {size}. Flies in light wind and forgives beginners.",
            "Microscope for small hands: two lenses, ten prepared slides and a notebook for discoveries.",
            "Plush octopus whose arms hold hands. Washable, and tested by a panel of {num} toddlers.",
        ),
        "sports": (
            "Climbing chalk in a refillable ball of {size}. Dust-free, as most gyms now ask for it.",
            "Adjustable dumbbell that goes from two to {num} kilograms with a turn of the handle.",
            "Swim goggles with {color} lenses for open water, anti-fog for a season if you keep your fingers off.",
            "Yoga mat of natural rubber, {size} thick, grips more the more you sweat.",
            "Trail running vest with two soft flasks and space for a jacket, nothing bounces on the way down.",
        ),
        "stationery": (
            "Dot-grid notebook, {size}, {num} numbered pages and paper that takes fountain ink without ghosting.",
            "Mechanical pencil of brass, {color}, retractable tip, so it does not stab through the pocket.",
            "Wall planner for a whole year on one sheet, with room for {num} people in a household.",
            "Refillable highlighters in muted tones, starting with {color}. Made of recycled bottle caps.",
            "Desk organiser folded from one sheet of felt. Holds cables, cards and the scissors that walk away.",
        ),
    },
    "log": {
        "disk": (
            "kernel: EXT4-fs warning (device sda{num}): ext4_dx_add_entry: Directory index full, reach max htree level",
            "monitor[812]: filesystem {path} at {pct}% of capacity, growing {num} MiB per minute",
            "{service}: write {path}/segment-{num}.tmp: No space left on device",
            "smartd[733]: Device: /dev/nvme0n1, Critical Warning (0x04): reliability degraded, {num} media errors",
            "kernel: blk_update_request: I/O error, dev sdb, sector {ms}{num} op 0x1:(WRITE) flags 0x800",
        ),
        "network": (
            "{service}: dial tcp {ip}:5432: connect: connection refused (attempt {num})",
            "kernel: eth0: link becomes ready, then down after {ms} ms; carrier changed {num} times",
            "haproxy[411]: backend {service} has no server available! last response from {ip} was {ms} ms ago",
            "resolved: using degraded feature set UDP instead of UDP+EDNS0 for DNS server {ip}",
            "{service}: TLS handshake timeout with {ip} after {ms} ms, peer sent {num} bytes",
        ),
        "memory": (
            "kernel: Out of memory: Killed process {ms} ({service}) total-vm:{ms}00kB, anon-rss:{ms}0kB",
            "{service}: GC overhead: {pct}% of the last minute spent in collection, heap at {num} MiB after full GC",
            "kernel: {service}: page allocation failure: order:4, mode:0xcc0(GFP_KERNEL), nodemask=(null)",
            "{service}: cannot allocate buffer of {num} MiB on device 0, {pct}% in use; retrying on host",
            "systemd-oomd: considered killing {service}.service: memory pressure {pct}% for more than {num}s",
        ),
        "auth": (
            "sshd[{num}]: Failed password for invalid user {user} from {ip} port {ms} ssh2",
            "sudo: {user} : user NOT in sudoers ; TTY=pts/{num} ; PWD={path} ; COMMAND=/usr/bin/cat /etc/shadow",
            "{service}: token for {user} rejected: expired {num} minutes before request from {ip}",
            "pam_unix(cron:session): session opened for user {user}(uid=0) outside of maintenance window",
            "{service}: account {user} locked after {num} wrong codes, last address {ip}",
        ),
        "configuration": (
            "nginx: [emerg] unknown directive \"proxy_bufering\" in /etc/nginx/conf.d/{service}.conf:{num}",
            "{service}: option 'max_workers' is {num} but the pool allows 4; using 4. Set it in {path}/{service}.toml",
            "systemd: /etc/systemd/system/{service}.service:{num}: Failed to parse resource value, ignoring: 2 GB",
            "{service}: environment variable LEDGER_URL is unset, falling back to {ip} which is deprecated since {version}",
            "{service}: duplicate key 'timeout' in {path}/settings.yaml line {num}: the second value wins ({ms})",
        ),
        "deployment": (
            "kubelet: Back-off pulling image \"registry.local/{service}:{version}\" ({num} attempts)",
            "deployer: rollout of {service} {version} paused: {num} of 12 replicas ready, health check took {ms} ms",
            "migrate: {service} schema is at {num}, code expects {version}; refusing to start",
            "{user}: rolled back {service} from {version} after error rate reached {pct}%",
            "ci: artifact {service}-{version}.tar.gz: checksum mismatch, expected size {ms} bytes",
        ),
    },
}  # fmt: skip


def items() -> list[dict[str, str]]:
    """All texts, kind by kind and label by label."""
    made = []
    for kind, labels in TEXTS.items():
        for label, cores in labels.items():
            for number in range(PER_CORE * len(cores)):
                rng = random.Random(f"{label}:{number}")
                before, after = FRAMES[kind]
                text = _pick(rng, before) + cores[number % len(cores)] + _pick(rng, after)
                made.append({"kind": kind, "label": label, "text": _filled(text, rng)})
    return made


def _filled(text: str, rng: random.Random) -> str:
    while "{" in text:
        before, _, rest = text.partition("{")
        gap, _, after = rest.partition("}")
        text = before + _pick(rng, GAPS[gap].split("|")) + after
    return text


def _pick(rng: random.Random, options: list[str] | tuple[str, ...]) -> str:
    return options[int(rng.random() * len(options))]


if __name__ == "__main__":
    for item in items():
        sys.stdout.buffer.write(msgspec.json.encode(item) + b"\n")
